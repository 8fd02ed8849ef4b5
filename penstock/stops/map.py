"""The map stop: applies an operation or any callable to each sample, or to a field of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.keyed import Keyed, seed_globals
from penstock.operation import Operation
from penstock.stops.field import Field, On, no_field, works_on
from penstock.stops.stop import Fields, KernelWork, Rows, Step, StepContext, Stop, each

Function = Operation | Callable[..., Any]


@dataclass(frozen=True)
class Map(Stop):
    """Applies ``function`` to the field ``on``.

    ``ordinal``: number of maps above it. It keys the randomness, and not the position among all
    stops, so adding or removing a cache changes no sample. ``label``: the name that the user gave.
    ``wants_rng``: the function has a parameter ``rng`` for its generator.
    """

    function: Function
    on: On = None
    random: bool = True
    version: str | None = None
    label: str = ""
    ordinal: int = 0
    wants_rng: bool = False

    @property
    def name(self) -> str:
        return self.label or name_of(self.function)

    @property
    def full_call(self) -> str:
        function = self.function
        if not isinstance(function, Operation):
            version = "" if self.version is None else f", version={self.version!r}"
            return f".map({self.name}{version})"
        given = [
            f"{one.name}={value!r}"
            for one in fields(cast(Any, function))  # operations are dataclasses
            if one.init and one.repr
            if repr(value := getattr(function, one.name)) != repr(one.default)
        ]
        return f".map({self.name}({', '.join(given)}))"

    @property
    def threadsafe(self) -> bool:  # type: ignore[override]
        return isinstance(self.function, Operation) and not self.function.holds_gil

    @property
    def preserves_input(self) -> bool:  # type: ignore[override]
        # Operations that users wrote may change samples in place.
        ours = type(self.function).__module__.startswith("penstock.")
        return isinstance(self.function, Operation) and ours

    @property
    def global_random(self) -> bool:  # type: ignore[override]
        return self.random and not self.wants_rng and not isinstance(self.function, Operation)

    def output(self, fields: Fields) -> Fields:
        if not isinstance(self.function, Operation):
            if self.on is None or not isinstance(fields, dict):
                return None
            return {**fields, self.on: None}
        if isinstance(fields, dict):
            on = self._field(fields)
            return {**fields, on: self.function.output(fields[on])}
        if self.on is not None:
            if fields is not None:
                no_field(self.name, self.on, [])
            return None
        if fields is None:
            self.function.output(None)
            return None
        return self.function.output(fields)

    def _field(self, fields: Mapping[str | int, Any]) -> str | int:
        wanted = self.on
        if wanted is None and isinstance(self.function, Operation):
            wanted = 0 if 0 in fields else self.function.field
        if wanted is None or wanted not in fields:
            no_field(self.name, wanted, list(fields))
        return wanted

    def fingerprint(self) -> str | None:
        if self.version is not None:
            return fingerprint(("map", self.name, self.version, self.on))
        parts: tuple[Any, ...] = ("map", self.function, self.on, self.random)
        arithmetic = self.function.arithmetic() if isinstance(self.function, Operation) else None
        return fingerprint(parts if arithmetic is None else (*parts, arithmetic))

    def for_kernel(self, seed: int, field: str | int | None) -> KernelWork | None:
        if not isinstance(self.function, Operation):
            return None
        if not works_on(self.on, self.function.field, field):
            return None
        work: KernelWork | None = self.function.kernel_work(Keyed(seed, f"map/{self.ordinal}").key)
        return work

    def step(self, context: StepContext) -> Step:
        call = self._call(context)
        if self.on is None and not isinstance(self.function, Operation):
            return each(self.name, call)
        named = self.function.field if isinstance(self.function, Operation) else ""
        place = Field(self.name, self.on, named).replace
        return each(self.name, lambda sample, key: place(sample, call, key))

    def _call(self, context: StepContext) -> Callable[[Any, Any], Any]:
        """The function as ``(value, key) -> value``, with keyed randomness."""
        function = self.function
        keyed = Keyed(context.seed, f"map/{self.ordinal}")
        at = keyed.at
        if isinstance(function, Operation):
            return self._operation(function, keyed, context.rows)
        if is_albumentations(function):
            return _albumentations(function, keyed)
        if not self.random:
            return lambda value, key: function(value)
        if self.wants_rng:
            return lambda value, key: function(value, rng=at(key))

        def seeded(value: Any, key: Any) -> Any:
            seed_globals(at(key))
            return function(value)

        return seeded

    def _operation(
        self, operation: Operation, keyed: Keyed, rows: Rows | None
    ) -> Callable[[Any, Any], Any]:
        at, draw, apply = keyed.at, operation.draw, operation.apply
        if rows is not None:
            on, into, next_row = self.on, operation.apply_to, rows.next

            def apply(value: Any, params: Any) -> Any:
                return into(value, params, next_row(on, operation.field))

        if not operation.random:
            return lambda value, key: apply(value, None)
        return lambda value, key: apply(value, draw(at(key), value.shape))


def make_map(
    function: Function,
    *,
    on: On,
    random: bool | None,
    version: str | None,
    name: str | None,
    ordinal: int,
) -> Map:
    """A map stop from the arguments of ``Pipeline.map``. Raises PipelineError."""
    if isinstance(function, type) and issubclass(function, Operation):
        raise PipelineError(
            f"map() got the class {function.__name__}, not an operation. Call it to make one: "
            f"map({function.__name__}(...))."
        )
    if isinstance(function, Operation):
        if random is not None and random != function.random:
            kind = "random" if function.random else "not random"
            raise PipelineError(
                f"map() got random={random}, and {function.name} is {kind}: Penstock's operations "
                "know this themselves. Leave random= out."
            )
        return Map(function, on, function.random, version, name or "", ordinal)
    if not callable(function):
        raise PipelineError(
            f"map() got {function!r}, which cannot be called. Give an operation, such as "
            "ps.image.decode(), or a function of one sample."
        )
    wants_rng = _takes_rng(function)
    known = deterministic(function)
    is_random = random if random is not None else wants_rng or not known
    return Map(function, on, is_random, version, name or "", ordinal, wants_rng and is_random)


def _takes_rng(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "rng" in parameters


_DETERMINISTIC = {
    "CenterCrop",
    "ConvertImageDtype",
    "FiveCrop",
    "Grayscale",
    "Identity",
    "Normalize",
    "PILToTensor",
    "Pad",
    "Resize",
    "ToDtype",
    "ToImage",
    "ToPILImage",
    "ToPureTensor",
    "ToTensor",
}


def deterministic(function: Callable[..., Any]) -> bool:
    """Whether it is known not to be random: fixed transforms of torchvision, and their Compose."""
    module = type(function).__module__ or ""
    if not module.startswith("torchvision.transforms"):
        return False
    if type(function).__name__ == "Compose":
        return all(deterministic(t) for t in function.transforms)  # type: ignore[attr-defined]
    return type(function).__name__ in _DETERMINISTIC


def is_albumentations(function: Callable[..., Any]) -> bool:
    return type(function).__module__.split(".")[0] in ("albumentations", "albucore")


def _albumentations(function: Any, keyed: Keyed) -> Callable[[Any, Any], Any]:
    """A call of an Albumentations transform, which takes images by keyword and has generators of
    its own."""
    reseed = getattr(function, "set_random_seed", None)

    def call(value: Any, key: Any) -> Any:
        generator = keyed.at(key)
        if reseed is not None:
            reseed(int(generator.integers(2**31)))
        else:
            seed_globals(generator)
        return function(image=value)["image"]

    return call


def name_of(function: Function) -> str:
    """The name of a callable, for messages."""
    if isinstance(function, Operation):
        return function.name
    name = getattr(function, "__name__", None)
    return str(name) if name else type(function).__name__
