"""The table of the README of this folder names tests that exist, for every case."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.once

HERE = pathlib.Path(__file__).parent
README = (HERE / "README.md").read_text()


def test_every_test_of_the_table_exists():
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", README))
    assert len(named) > 100
    for file, test in named:
        text = (HERE.parent / file).read_text()
        assert re.search(rf"^ *def {test}\(", text, re.MULTILINE), f"{file}::{test}"


def test_every_test_of_the_folder_is_in_the_table():
    for file in HERE.glob("test_*.py"):
        for test in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE):
            assert f"`peers/{file.name}::{test}`" in README, test


def test_every_case_has_a_row():
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)]
    assert rows == list(range(1, 24))
