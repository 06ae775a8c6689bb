"""Every transform of the library in one list: a new one gets the laws, and its own tests, by a row here."""

from tests.registry.links import LINKS
from tests.registry.optimizers import OPTIMIZERS
from tests.registry.posteriors import POSTERIORS
from tests.registry.samplers import SAMPLERS
from tests.registry.transform import Transform

TRANSFORMS = (*LINKS, *OPTIMIZERS, *SAMPLERS, *POSTERIORS)

__all__ = ["LINKS", "OPTIMIZERS", "POSTERIORS", "SAMPLERS", "TRANSFORMS", "Transform"]
