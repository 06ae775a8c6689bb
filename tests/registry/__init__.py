"""Every transform of the library in one list: a new one gets the laws, and its own tests, by a row here."""

from tests.registry.links import LINKS, OPTIMIZERS
from tests.registry.samplers import POSTERIORS, SAMPLERS
from tests.registry.transform import Transform

TRANSFORMS = (*LINKS, *OPTIMIZERS, *SAMPLERS, *POSTERIORS)

__all__ = ["LINKS", "OPTIMIZERS", "POSTERIORS", "SAMPLERS", "TRANSFORMS", "Transform"]
