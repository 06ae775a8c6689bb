"""The features of a linear last layer, kept, so that a body that no longer changes runs once for each datum.

A posterior over the last layer alone is that of Snoek et al. (2015).

    cache = cache_features(module, loader)          # phi(x) of every batch, in memory
    bc.fit_laplace(module, likelihood, cache)       # curvature, tuning, refit, predictions: the head alone

A cache knows the tensors that its features were computed with and their versions, which torch counts up at every change in
place: a cache whose body has moved on since is refused. (Torch does not count changes through ``.data``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from bayesopt_chain import kinds
from bayesopt_chain.modules.functional import make_functional
from bayesopt_chain.posterior.batches import Reader, logits_of, peeked, require_eval, with_progress
from bayesopt_chain.posterior.last_layer import (
    Body,
    Features,
    HeadBatch,
    LastLayer,
    body_of,
    find_last_layer,
    unwrapped,
)


@dataclass(frozen=True)
class CachedFeatures:
    """What :func:`cache_features` returns: an iterable of batches that every function of a fit takes for a loader.

    Attributes:
        batches: pairs of features ``[B, *, D]`` and targets.
        last: the last layer of the module.
        body: the other tensors of the module, by name, each with its version.
    """

    batches: tuple[HeadBatch, ...]
    last: LastLayer
    body: Body

    def __iter__(self) -> Iterator[HeadBatch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def require_body(cache: CachedFeatures, body: Body) -> None:
    """Raise unless the features were computed with these tensors at these versions."""
    names = sorted({*body, *cache.body})
    changed = [name for name in names if not _same(body.get(name), cache.body.get(name))]
    if changed:
        raise ValueError(
            f"the cached features are not those of this module now: {', '.join(changed[:4])} changed since, or belong to "
            "another module: call cache_features again"
        )


def _same(a: tuple[Tensor, int] | None, b: tuple[Tensor, int] | None) -> bool:
    return a is not None and b is not None and a[0] is b[0] and a[1] == b[1]


@kinds.takes(params=kinds.TREE.or_none(), loader=kinds.BATCHES)
def cache_features(
    module: nn.Module, loader: Iterable, *, params: Mapping[str, Tensor] | None = None, progress: bool = False
) -> CachedFeatures:
    """Run the body of a module once over some data and keep what its linear last layer sees.

    Pass the result in the place of the loader: to :func:`bayesopt_chain.fit_laplace` as often as structures, priors or
    likelihoods are to be compared, to ``predict`` and ``refit`` of a fit, as ``validation=``, and to
    :func:`bayesopt_chain.posterior.train_by_evidence`. It holds N x D numbers for N data and D features.

    Args:
        module: a trained module in ``eval`` mode whose last layer is an ``nn.Linear`` that gives the output.
        loader: an iterable of batches ``(inputs, targets)``, read once.
        params: the trained parameters. Default: the module's own.
        progress: show a progress bar (needs tqdm).

    Returns:
        A :class:`CachedFeatures`. Where it is used after the body has changed, a ``ValueError`` says so.

    Raises:
        ValueError: a last layer that is not linear, runs twice, or is not the end; a module in training mode with layers that
            it changes; no batches.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.posterior import cache_features
        >>> _ = torch.manual_seed(0)
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
        >>> cache = cache_features(module, [(torch.randn(60, 2), torch.randint(0, 3, (60,)))])
        >>> fits = [bc.fit_laplace(module, bc.likelihoods.categorical(), cache, structure=s) for s in ("dense", "diagonal")]
        >>> fits[0].predict(cache).shape
        torch.Size([60, 3])
    """
    module = unwrapped(module)
    require_eval(module, "cache_features")
    batches = peeked(loader, "cache_features", Reader(module))
    forward, own, _ = make_functional(module, outputs=logits_of)
    chosen = own if params is None else dict(params)
    last = find_last_layer(forward, chosen, batches.first)
    if not last.is_head:
        raise ValueError(
            f"cache_features: the last layer ({', '.join(last.names)}, {type(last.module).__name__}) is no nn.Linear "
            "that runs once and gives the output, so that its features do not suffice: pass the loader itself"
        )
    features = Features(forward, chosen, last.module, body_of(module, params, last.names))
    seen = batches.from_first(HeadBatch(last.inputs[0].detach(), batches.first[1]))
    kept = tuple(features(batch) for batch in with_progress(seen, progress, batches.total))
    return CachedFeatures(kept, last._replace(inputs=()), features.body)
