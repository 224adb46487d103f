"""The examples in the documentation of the client, run against the real server."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import dovetail
from harness import Server

MODULES = ["dovetail", *(f"dovetail.{module.name}" for module in pkgutil.iter_modules(dovetail.__path__))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_show_the_real_output(server: Server, client: dovetail.Client, name: str) -> None:
    module = importlib.import_module(name)
    names = {**vars(module), "server": server.uri, "client": client}
    outcome = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS, report=True)
    assert outcome.failed == 0


def test_every_public_method_has_a_docstring() -> None:
    for owner in (dovetail.Client, dovetail.Result, dovetail.Job, dovetail.Explanation):
        for name, member in vars(owner).items():
            if not name.startswith("_") and callable(member):
                assert member.__doc__, f"{owner.__name__}.{name}"
