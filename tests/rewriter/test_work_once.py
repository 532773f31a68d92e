"""Work that the rewriter does once, or not at all, while it traces a function."""

import itertools
import random

import jax
import pytest

from _programs import PROGRAMS, W, X, loss_of
from flax_amp import amp
from flax_amp._rewriter import captures, paint
from flax_amp._rewriter.outline import repeats
from helpers import plan_of


def relus(w, x):
    for _ in range(5):
        x = jax.nn.relu(x @ w)
    return x


def gradient(fn):
    return jax.make_jaxpr(jax.grad(amp(loss_of(fn), compute_dtype="bfloat16")))(W, X)


def test_each_rule_is_searched_once(monkeypatch):
    searched, search = [], captures._reaches_user_code

    def record(rule):
        searched.append(rule)
        return search(rule)

    monkeypatch.setattr(captures, "_reaches_user_code", record)
    gradient(relus)
    assert len(searched) == len({id(rule) for rule in searched})
    assert len(searched) == 7  # five calls, and those in the rules of two plans


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_flow_is_found_once(name, monkeypatch):
    """Of a jaxpr for given needs, however many equations call it."""
    found, find = [], paint.find_flow

    def record(jaxpr, out_needs, has_product, reads):
        found.append((jaxpr, out_needs))
        return find(jaxpr, out_needs, has_product, reads)

    monkeypatch.setattr(paint, "find_flow", record)
    plan_of(loss_of(PROGRAMS[name]), W, X)
    assert found
    assert len(found) == len({(id(jaxpr), needs) for jaxpr, needs in found})


def _is_in_a_run(kinds, i, copies):
    """Whether an equation is in a stretch of equal pieces, found by trying all."""
    for period in range(1, len(kinds) // copies + 1):
        size = period * copies
        for start in range(max(0, i - size + 1), min(i, len(kinds) - size) + 1):
            piece = kinds[start : start + size]
            if piece[period:] == piece[:-period]:
                return True
    return False


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_kinds_leave_out_no_equation_of_a_run(copies, monkeypatch):
    monkeypatch.setattr(repeats, "_MIN_COPIES", copies)
    draw = random.Random(copies)
    for _ in range(100):
        layer = draw.choices("abcd", k=draw.randint(1, 4))
        noise = [draw.choices("abcde", k=draw.randint(0, 6)) for _ in range(2)]
        kinds = [*noise[0], *layer * draw.randint(1, 8), *noise[1]]
        found = repeats._may_repeat(kinds)
        runs = {i for i in range(len(kinds)) if _is_in_a_run(kinds, i, copies)}
        assert runs <= found
        assert found <= set(range(len(kinds)))


def test_kinds_leave_out_what_stands_between_rare_ones():
    parts = itertools.chain.from_iterable(["a"] * 4 + [name] for name in "xyz")
    assert repeats._may_repeat(list(parts)) == set()
    assert repeats._may_repeat(["x", *"ab" * 5, "y", *"ab" * 4]) == set(range(1, 11))
