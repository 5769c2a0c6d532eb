"""Reads `FAMILY[=VALUE][,key=value...]`: a drafter with its settings, on a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast, get_args

from pydantic import create_model
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from drafter_svc.config import DrafterSettings, required_setting, settings_schema
from drafter_svc.families.registry import find_family, known_families
from drafter_svc.families.settings import OF_FAMILIES, FamilySettings
from outrider.errors import OutriderError, Reason, invalid
from outrider.process.settings.config import DEVICE, Settings, load

Place = Literal["process", "in-process"]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter, as in `model=PATH,cores=0,2,4-7`.

    VALUE is the family's required setting. The keys are the drafter's own settings; their values
    may have commas. The key `place` is not a setting: it says whether the drafter has its own
    process. The place is None if `outrider serve` decides.
    """

    family: str
    options: dict[str, str]
    place: Place | None = None

    @classmethod
    def parse(cls, text: str, field: str = "drafter") -> DrafterSpec:
        """Read a flag's text; raise OutriderError(INVALID_VALUE) that shows the right form.

        `field` is the flag that the error names.
        """
        head, *pairs = text.split(",")
        family, _, value = head.partition("=")
        options: dict[str, str] = {}
        for pair in pairs:
            key, given, option = pair.partition("=")
            if given or not options:
                options[key.replace("-", "_")] = option
            else:
                last = next(reversed(options))
                options[last] = options[last] and f"{options[last]},{pair}"
        if not all(key and option for key, option in options.items()):
            families = f"{', '.join(known_families())} or package.module:Class"
            raise invalid(field, f"must be {families}, then key=value, not {text!r}")
        if not re.fullmatch(DEVICE, options.get("device", "auto")):
            message = f"device must be auto, cpu, cuda or cuda:N, not {options['device']!r}"
            raise invalid(field, message)
        place = options.pop("place", None)
        if place not in (None, *get_args(Place)):
            raise invalid(field, f"place: must be {' or '.join(get_args(Place))}, not {place!r}")
        spec = cls(family, _required(family, value, field) | options, cast(Place | None, place))
        if place == "in-process":
            spec.check_in_process(field)
        return spec

    def __str__(self) -> str:
        """Return the text that `parse` reads, without the place."""
        required = required_setting(self.schema)
        value = f"={self.options[required]}" if required else ""
        pairs = [f",{key}={value}" for key, value in self.options.items() if key != required]
        return "".join([self.family, value, *pairs])

    @property
    def schema(self) -> type[DrafterSettings]:
        """The settings of the drafter's process."""
        return settings_schema(self.family)

    @property
    def runs_model(self) -> bool:
        """True if the drafter runs a model, and so needs cores or a GPU."""
        return "device" in self.schema.model_fields

    @property
    def reads_states(self) -> bool:
        """True if the drafter reads the target's hidden states."""
        return settings_of(self.family).reads_states

    @property
    def shares_redis(self) -> bool:
        """True if the drafter can share its n-grams or texts through a Redis."""
        return "redis" in self.schema.model_fields

    @property
    def in_process_schema(self) -> type[InProcessSettings]:
        """The settings of the drafter in the verifier's process."""
        return _in_process_schema(self.family)

    def in_verifier(self, name: str) -> DrafterSpec:
        """Return the same drafter in the verifier's process, with this id."""
        options = self.options | {"id": name}
        options.pop("device", None)
        return replace(self, options=options, place="in-process")

    def check_in_process(self, field: str) -> None:
        """Check that the drafter can run in the verifier's process.

        Raises OutriderError(INVALID_VALUE).
        """
        if not self.runs_model:
            message = f"{self.family} computes nothing on a device: give it a process of its own"
            raise invalid(field, message)
        if "device" in self.options:
            raise invalid(field, f"{self.family} takes no device: it computes on the target's")
        try:
            self.settings_in_process({"target": "any"})
        except ValueError as error:
            problems = "; ".join(str(error).splitlines())
            raise invalid(field, f"{self.family}: {problems}") from error

    def settings_in_process(self, given: Mapping[str, Any]) -> InProcessSettings:
        """Return the family's settings in the verifier's process.

        `given` are the verifier's settings. A setting that the family has too is copied from
        `given`, unless the drafter's text sets it. Raises ValueError with one line per problem.
        """
        schema = self.in_process_schema
        known = {name: value for name, value in given.items() if name in schema.model_fields}
        return load(schema, known | self.options)


class InProcessSettings(Settings):
    """The settings of a drafter in the verifier's process besides its family's settings."""

    id: str = ""
    """The drafter's name in requests, metrics and logs; unless set, made of family, host and
    process id."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the given values: the environment has the settings of other drafters."""
        return (init_settings,)


@cache
def _in_process_schema(family: str) -> type[InProcessSettings]:
    bases = (settings_of(family), InProcessSettings)
    return cast(type[InProcessSettings], create_model("InProcessSettings", __base__=bases))


def settings_of(family: str) -> type[FamilySettings]:
    """Return a family's own settings. Raises OutriderError(INVALID_VALUE) for an unknown family."""
    return OF_FAMILIES.get(family) or find_family(family).settings


def _required(family: str, value: str, field: str) -> dict[str, str]:
    try:
        required = required_setting(settings_schema(family))
    except OutriderError as error:
        raise OutriderError(Reason.INVALID_VALUE, error.message, field) from error
    if required is None:
        if value:
            hint = f"{family} takes no value; its settings follow as key=value after commas"
            raise invalid(field, f"{family}={value}: {hint}")
        return {}
    if not value:
        example = f"{family}={required.upper()}"
        raise invalid(field, f"{family} needs its {required}, as in {example}")
    return {required: value}
