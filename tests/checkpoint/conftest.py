"""What the tests of `migrate` share."""

import pytest

from _foreign import trained


@pytest.fixture(scope="module")
def image():
    return trained()
