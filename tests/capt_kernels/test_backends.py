"""What a machine has, as its environment tells."""

from __future__ import annotations

import pytest

from capt_kernels.backends import interpreted


@pytest.mark.parametrize("value", ["1", "true", "True", "YES", "on", "y", "0", "", "off", "no", "False", "2"])
def test_the_interpreter_is_on_where_triton_says_so(value, monkeypatch):
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreted() == knobs.runtime.interpret
