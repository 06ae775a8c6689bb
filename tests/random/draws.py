"""Draws of the counter-based stream in one call, as tests ask for them."""

import os
import subprocess
import sys

import torch

from bayesopt_chain.random.philox import draw_elements, in_tensors, parts_of_leaves, whole_leaves


def leaf(key, step, size, draw, dtype, kind="gaussian"):
    """A whole leaf."""
    return draw_elements(key, step, whole_leaves([size], [draw]), dtype, kind)[0]


def leaf_in_tensors(key, step, size, draw, dtype):
    """A whole leaf's normals by tensor operations."""
    return in_tensors(key, step, whole_leaves([size], [draw]), dtype)


def parts(key, step, runs, draws, dtype, kind="gaussian"):
    """Runs of leaves."""
    return draw_elements(key, step, parts_of_leaves(tuple(runs), tuple(draws)), dtype, kind)


def cut(x, runs):
    """Runs of a whole leaf that has been drawn."""
    return torch.cat([x[..., a : a + n] for a, n in runs], dim=-1)


# What can be known of a Triton kernel where there is no device: its results in the interpreter, and its code


def run(program: str, device: str = "cpu", **env) -> None:
    """Run a program that prints ``alike``, in a process of its own: the interpreter is chosen as Triton is imported."""
    out = subprocess.run(
        [sys.executable, "-c", program, device], env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert "alike" in out.stdout


INEXACT = r"sin\.approx|cos\.approx|lg2\.approx|ld\.local|st\.local"  # off by more than 1e-6; and scratch memory
