r"""The loss of tokens whose minibatch gradient is unbiased at any lengths.

Data are sequences ``i`` of ``n_i`` counted tokens each, ``N = sum_i n_i`` of them in ``S`` sequences, ``m = N / S`` on average.
The loss ``L = (1/N) sum_i sum_t -log p(y_it | .)`` is a mean over tokens, so that its posterior has the temperature
``T = 1 / N``. Of a batch of ``B`` sequences, drawn alike,

    l = (1 / (B m)) sum_{i in batch} sum_t -log p(y_it | .),        E l = L.

The mean over the batch's own tokens, which trainers take by default, divides by ``sum_{i in batch} n_i`` in the place of
``B m``: its expectation is another loss as soon as lengths differ, in which tokens of short sequences count more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bayesopt_chain import checks
from bayesopt_chain.modules import LEFT_OUT, logits_of, next_labels


def largest_label(who: str, targets: Tensor) -> int:
    """The largest label that counts.

    Raises:
        ValueError: a negative one, other than -100.
    """
    counted = targets[targets != LEFT_OUT]
    if counted.numel() and int(counted.min()) < 0:
        raise ValueError(
            f"{who}: labels hold {int(counted.min())}: pass numbers of tokens, from 0, and {LEFT_OUT} where a token does not "
            "count"
        )
    return int(counted.max()) if counted.numel() else 0


def require_known(who: str, largest: int, logits: Tensor) -> None:
    """Refuse labels outside of the model's vocabulary, of which there are as many as logits ``[*, V]``.

    Raises:
        ValueError: there are such labels.
    """
    if largest >= logits.shape[-1]:
        raise ValueError(
            f"{who}: labels (or answers) hold {largest}, and the model predicts {logits.shape[-1]} tokens, from 0: pass labels "
            f"of its own tokenizer, and {LEFT_OUT} where a token does not count"
        )


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over counted tokens of the negative log-likelihood in nats, in float32 at least, 0-d."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"labels are {tuple(targets.shape)}, where the model asks for {tuple(logits.shape[:-1])}, one a token"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=LEFT_OUT, reduction="sum")


class TokenLoss:
    """A loss for ``transformers.Trainer(compute_loss_func=...)`` whose gradient is unbiased for the mean over all tokens.

    With it the temperature is ``1 / tokens``, whatever the lengths of the sequences: see the module.

    Args:
        labels: ``[S, T]`` int64, those of all training data as a tokenizer gives them (unshifted, -100 where a token does not
            count); or a list of such rows of any lengths.
        accumulation_steps: the Trainer's ``gradient_accumulation_steps``, whose losses it adds up. Default 1.

    Attributes:
        tokens: how many tokens count, ``N``; the first of a sequence never does, since nothing predicts it.
        tokens_per_sequence: ``m = N / S``.

    Raises:
        ValueError: no token counts; negative labels other than -100; when called, labels outside of the vocabulary.

    Example:
        >>> import torch; from bayesopt_chain import lora
        >>> labels = torch.tensor([[5, 6, 7, 8], [5, 6, -100, -100]])
        >>> loss = lora.TokenLoss(labels)
        >>> loss.tokens, loss.tokens_per_sequence                       # 3 + 1; T = 1 / 4
        (4, 2.0)
        >>> logits = torch.zeros(2, 4, 9)                               # the uniform distribution over nine words
        >>> torch.allclose(loss(logits, labels), torch.tensor(9.0).log())
        True
    """

    def __init__(self, labels: Any, *, accumulation_steps: int = 1) -> None:
        rows = [torch.as_tensor(row, device="cpu").reshape(-1) for row in labels]
        self.tokens = sum(int((row[1:] != LEFT_OUT).sum()) for row in rows)
        if not self.tokens:
            raise ValueError("TokenLoss: labels has no token that counts behind the first of its sequence")
        self._largest = max([largest_label("TokenLoss", row[1:]) for row in rows])
        checks.WHOLE("TokenLoss: accumulation_steps", accumulation_steps)
        self.tokens_per_sequence = self.tokens / len(rows)
        self.accumulation_steps = accumulation_steps

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """The loss of a batch, 0-d.

        Args:
            outputs: logits ``[B, T, V]``, or what has them as ``logits``.
            labels: ``[B, T]``, unshifted.
            num_items_in_batch: what a Trainer hands over; not used.
        """
        sequences = len(labels) * self.accumulation_steps
        logits = logits_of(outputs)
        require_known("TokenLoss", self._largest, logits)
        return summed_loss(logits, next_labels(labels)) / (sequences * self.tokens_per_sequence)
