"""A process that dies before or after any fsync, rename or deletion leaves the run as it was, or as it was to be."""

import itertools
import os
from contextlib import suppress

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.runs import folder
from tests.runs.toys import sampled


class Dead(BaseException):
    """From here on the process does nothing more to the disk."""


class Machine:
    """Dies before (an even number) or after (an odd one) the disk has done something for the time ``at // 2``."""

    def __init__(self, monkeypatch, at=None):
        self.calls, self.at, self.dead = 0, at, False
        for name in ("fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, self.watched(getattr(os, name)))

    def watched(self, real):
        def call(*args, **more):
            mine, self.calls = self.calls, self.calls + 1
            self.dead = self.dead or mine * 2 == self.at
            if self.dead:
                raise Dead
            out = real(*args, **more)
            self.dead = mine * 2 + 1 == self.at
            if self.dead:
                raise Dead
            return out

        return call


def steps_read(path):
    """The draws on disk, each the number of its step and of the course that made it; ``None``: no run yet."""
    try:
        draws = bc.Draws.open(path)
    except FileNotFoundError as err:
        assert "there is no run in" in str(err)
        return None
    draws.verify()
    values = [int(x) for x in draws.params["weight"].flatten()] if len(draws) else []
    assert [value % 100 for value in values] == (draws.steps.tolist() if len(draws) else [])
    return values


class Loop:
    """A loop that goes back to earlier checkpoints of its own; the parameter says step and course."""

    def __init__(self, path):
        self.model, self.path, self.course, self.made, self.states = nn.Linear(1, 1, bias=False), path, 0, [], []
        self.states.append((None, []))
        self.keep = bc.collect(self.model, every=1, path=path, checkpoint_seconds=1e9)
        self.states.append(([], []))

    def to(self, step):
        while self.keep.step < step:
            with torch.no_grad():
                self.model.weight.fill_(100 * self.course + self.keep.step + 1)
            made = [*self.made, 100 * self.course + self.keep.step + 1]
            self.states.append((self.made, made))
            self.keep()
            self.keep.flush()
            self.made = made

    def back(self, step):
        self.states.append((self.made, self.made[:step]))
        self.keep.load_state_dict({"step": step})
        self.made, self.course = self.made[:step], self.course + 1


def life(path):
    """Commits, merges, a loop that goes back within a merged file, to the start of a file, and behind its own cut."""
    loop = Loop(path)
    with suppress(Dead):
        loop.to(6)
        loop.back(3)
        loop.to(8)
        loop.back(5)
        loop.back(2)
        loop.to(5)
    return loop


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(folder, "SMALL_FILES", 3)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # it takes most of the time, and a process that dies needs none
    monkeypatch.setattr("weakref.finalize", lambda *_: None)  # a process that dies lets go of nothing


def calls_of(path, monkeypatch):
    with monkeypatch.context() as patch:
        machine = Machine(patch)
        life(path)
        return 2 * machine.calls


def died(path, monkeypatch, at):
    """What the disk may hold after a death."""
    with monkeypatch.context() as patch:
        Machine(patch, at)
        loop = None
        with suppress(Dead):
            loop = life(path)
    return [None, []] if loop is None else loop.states[-1]


@pytest.mark.parametrize("each", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loop_that_dies_anywhere_loses_no_draw_and_keeps_none_of_a_course_that_it_left(
    tmp_path, monkeypatch, few, each
):
    for at in range(0, calls_of(tmp_path / "whole", monkeypatch), each):
        path = tmp_path / str(at)
        allowed = died(path, monkeypatch, at)
        found = steps_read(path)
        assert found in allowed, (at, found, allowed)
        again = bc.collect(nn.Linear(1, 1, bias=False), every=1, path=path, checkpoint_seconds=1e9)
        back = max(0, min(again.step, len(found or [])) - at % 3)
        again.load_state_dict({"step": back})
        for step in range(back + 1, back + 4):
            nn.init.constant_(again.model.weight, 900 + step)
            again()
            again.flush()
        assert steps_read(path) == [*(found or [])[:back], *range(901 + back, 904 + back)], at
        names = {p.name for p in path.iterdir()}
        assert len(names) <= 2 + back + 4 and not any(name.endswith(".tmp") for name in names), (at, names)


@pytest.mark.slow
def test_a_loop_that_dies_twice_anywhere(tmp_path, monkeypatch, few):
    for i, (first, second) in enumerate(
        itertools.product(range(0, calls_of(tmp_path / "x", monkeypatch), 11), range(0, 40, 7))
    ):
        path = tmp_path / str(i)
        allowed = died(path, monkeypatch, first)
        with monkeypatch.context() as patch:
            Machine(patch, second)
            with suppress(Dead):
                again = bc.collect(nn.Linear(1, 1, bias=False), every=1, path=path, checkpoint_seconds=1e9)
                again.load_state_dict({"step": max(0, again.step - 1)})
                nn.init.constant_(again.model.weight, 901 + again.step)
                again()
                again.flush()
        found = steps_read(path)
        new = [*found[:-1], found[-1] % 100] if found and found[-1] > 900 else found
        same = [
            x for x in allowed if x is None or new is None or [v % 100 for v in new] == [v % 100 for v in x][: len(new)]
        ]
        assert same and (not found or all(a in (b, 900 + b % 100) for a, b in zip(found, same[-1] or found))), (
            first,
            second,
        )


@pytest.mark.parametrize("each", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_dies_anywhere_ends_as_the_run_that_did_not(tmp_path, monkeypatch, few, each):
    want = sampled().params["w"]
    with monkeypatch.context() as patch:
        machine = Machine(patch)
        sampled(tmp_path / "whole")
    for at in range(0, 2 * machine.calls, each):
        path, before = tmp_path / str(at), 0
        with monkeypatch.context() as patch:
            Machine(patch, at)
            with suppress(Dead):
                sampled(path)
        with suppress(FileNotFoundError):
            draws = bc.Draws.open(path)
            before = len(draws)
            assert not before or torch.equal(draws.params["w"], want[:before]), at
        assert before >= at // 2 // 6 - 2, "steps that were committed are there"
        assert torch.equal(sampled(path).params["w"], want), at
        assert torch.equal(bc.Draws.open(path).params["w"], want), at
