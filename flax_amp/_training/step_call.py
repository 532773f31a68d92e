"""The call of a step, and the array to blame if it fails.

A step donates its state: the new state takes over the memory of the old one, which is
then deleted. JAX reports misuse by the position of a flattened argument only.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp._training.arguments import Array, PyTree, check_leaves


class Step:
    """A step whose errors name the arguments that it takes."""

    __name__: str

    def __init__(self, step: Callable[..., Any]) -> None:
        # With the name and the docstring of the step, as `jax.jit` has them.
        functools.update_wrapper(self, step)
        self._step, self._signature = step, inspect.signature(step)
        # The last parameter takes all further arguments, which the loss gets.
        self._names = list(self._signature.parameters)[:-1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) < len(self._names):  # binding takes some microseconds
            try:
                args = self._signature.bind(*args, **kwargs).args
            except TypeError as error:
                raise TypeError(
                    f"{self.__name__}: {error}; expected the arguments "
                    f"({', '.join(self._names)}, *args). Pass what else the loss takes "
                    "by position, after the batch."
                ) from None
        return self._step(*args)


class JittedStep(Step):
    """A jitted step whose errors name the leaf that is wrong.

    A loop calls it thousands of times, with arguments like those of the call before. So
    it looks at them before a call only where JAX would not do it in time, and after a
    call that has failed.
    """

    def __init__(
        self,
        jitted: Callable[..., Any],
        *,
        donates: bool,
        check: Callable[[Any], None] = lambda state: None,
    ) -> None:
        super().__init__(jitted)
        self._jitted, self._donates, self._check = jitted, donates, check
        # No method stands between, because warnings of `check` count the calls up to
        # the user's line, jitted or not.
        self._step = self._first_call

    def _first_call(self, state: PyTree, *inputs: PyTree) -> Any:
        with explain_deleted(self.__name__, "state", state):
            self._check(state)
        if not any(
            isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)
        ):
            # A state of other types is traced again, and the trace checks it.
            self._step = self._call
        return self._call(state, *inputs)

    def _call(self, state: PyTree, batch: PyTree, *args: PyTree) -> Any:
        def arguments() -> tuple[dict[str, PyTree], dict[str, PyTree]]:
            return {"state": state}, {"batch": batch, "args": args}

        with (
            explain_deleted(self.__name__, "state", state),
            explain_failure(self.__name__, self._donates, arguments),
        ):
            return self._jitted(state, batch, *args)

    def __getattr__(self, name: str) -> Any:
        """Returns `lower`, `trace` and every other attribute of a jitted function."""
        if name == "_jitted":  # the object is still being copied, and has no attributes
            raise AttributeError(name)
        return getattr(self._jitted, name)


@contextlib.contextmanager
def explain_failure(
    caller: str,
    donates: bool,
    arguments: Callable[[], tuple[dict[str, PyTree], dict[str, PyTree]]],
) -> Iterator[None]:
    """Names the leaf of an argument for which a call of a jitted step fails.

    With several devices, it looks for an array that is passed twice before the call.
    Otherwise the look costs nothing but after a failure: for 160 leaves it takes 28 µs,
    where the call itself takes 250.

    Args:
      caller: what the messages call the step.
      donates: whether the step donates.
      arguments: returns what it then donates and the other arguments, by name.
    """
    if donates and has_several_devices():
        check_distinct(caller, *arguments())
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        donated, others = arguments()
        if donates:
            check_distinct(caller, donated, others)
        if isinstance(error, TypeError):
            for name, argument in (donated | others).items():
                check_leaves(
                    argument,
                    name,
                    f"{caller}: got",
                    "arrays and numbers, all that a compiled step can take. Drop the "
                    "others, or make the step with jit=False.",
                )
        raise


@functools.cache
def has_several_devices() -> bool:
    """Whether an array that is passed twice has to be found before the call.

    With one device, JAX refuses the call before it takes any memory. With several,
    each device refuses by itself, which ends the process on CPUs.
    """
    return jax.local_device_count() > 1


def check_distinct(
    caller: str, donated: Mapping[str, PyTree], others: Mapping[str, PyTree]
) -> None:
    """Raises a ValueError if a donated array is a second time among the arguments.

    JAX refuses such a call too, without a path. The arguments are given by name, for
    the message.
    """
    leaves = jax.tree.leaves((donated, others))
    if len(set(map(id, leaves))) == len(leaves):  # nearly always, and no path is made
        return
    paths: dict[int, str] = {}
    for arguments in (donated, others):
        for path, array in _arrays(arguments):
            if first := paths.get(id(array)):
                raise ValueError(
                    f"{caller}: {first} and {path} are the same array; expected two "
                    "arrays, because the step donates the memory of the old ones to "
                    "the new ones. Copy one of them with jnp.copy, or make the "
                    "training step with donate=False."
                )
            # Two arguments that are only read may be one array.
            if arguments is donated:
                paths[id(array)] = path


@contextlib.contextmanager
def explain_deleted(caller: str, name: str, argument: PyTree) -> Iterator[None]:
    """Names the first deleted array of an argument if a call fails because of it."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "deleted" in str(error):
            check_not_deleted(caller, name, argument, error)
        raise


def check_not_deleted(
    caller: str, name: str, argument: PyTree, cause: Exception | None = None
) -> None:
    """Raises a RuntimeError that names the first deleted array of an argument."""
    arrays = _arrays({name: argument})
    if deleted := [path for path, array in arrays if array.is_deleted()]:
        raise RuntimeError(
            f"{caller}: {deleted[0]} was deleted ({len(deleted)} arrays of it were): "
            f"an earlier step took its memory for the new {name}. Expected the {name} "
            "that the last step returned. Go on with that, or make the training step "
            "with donate=False."
        ) from cause


def _arrays(arguments: Mapping[str, PyTree]) -> Iterator[tuple[str, Array]]:
    """Yields each array that is not traced, with its path."""
    for name, tree in arguments.items():
        for path, leaf in tree_leaves_with_path(tree):
            if isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer):
                yield f"{name}{keystr(path)}", leaf
