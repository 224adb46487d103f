"""Reads docker/Dockerfile, so that tests use the packages, user and settings that the image has."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field

from harness import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"


@dataclass
class Stage:
    """A stage of the Dockerfile: its base, its instructions in order, and what they set."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.instructions if name == instruction]

    def one(self, instruction: str) -> str:
        [text] = self.all(instruction)
        return text

    def packages(self) -> list[str]:
        """The Debian packages that it installs."""
        words = re.findall(r"apt-get install ([^&]*)", " ".join(self.all("RUN")))
        return [word for word in " ".join(words).split() if not word.startswith("-")]

    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for text in self.all("ENV") for word in shlex.split(text))

    def health_check(self) -> list[str]:
        return json.loads(self.one("HEALTHCHECK").split("CMD", 1)[1])


def stages() -> list[Stage]:
    """The stages, with the values of ARG put in before the first."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    text = text.replace("\\\n", " ")
    found: list[Stage] = []
    defaults: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, rest = line.split(None, 1)
        if name == "ARG" and not found:
            key, value = rest.split("=", 1)
            defaults[key] = value
        elif name == "FROM":
            for key, value in defaults.items():
                rest = rest.replace(f"${{{key}}}", value)
            base, *as_name = re.split(r"\s+AS\s+", rest)
            found.append(Stage(base, as_name[0] if as_name else ""))
        else:
            found[-1].instructions.append((name, " ".join(rest.split())))
    return found
