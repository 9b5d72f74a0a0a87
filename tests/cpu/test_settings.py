"""Settings: environment, options, and errors that name what is wrong."""

from pathlib import Path

import pytest

from fa4_inductor import settings as S
from fa4_inductor.errors import SettingsError


def test_defaults_and_count():
    assert S.Settings.from_env({}) == S.Settings()
    assert len(S.describe()) <= 10


def test_environment_overrides_defaults_and_options_override_the_environment():
    env = {"FA4_INDUCTOR_STRICT": "1", "FA4_INDUCTOR_IMPLEMENTATION": "Reference", "FA4_INDUCTOR_CACHE_DIR": "/x/y"}
    settings = S.Settings.from_env(env)
    assert settings.strict and settings.implementation == "reference" and settings.cache_dir == Path("/x/y")
    settings = settings.with_options({"fa4.strict": False, "fa4.implementation": "cute", "fa4.cache-dir": "/z"})
    assert not settings.strict and settings.implementation == "cute" and settings.cache_dir == Path("/z")


@pytest.mark.parametrize(
    "name, value",
    [
        ("STRICT", "maybe"),
        ("IMPLEMENTATION", "triton"),
        ("CACHE_DIR", " "),
        ("COMPILE_THREADS", "0"),
        ("TARGET_ARCH", "hopper"),
    ],
)
def test_a_bad_value_names_the_variable(name, value):
    with pytest.raises(SettingsError, match=f"FA4_INDUCTOR_{name}"):
        S.Settings.from_env({f"FA4_INDUCTOR_{name}": value})


def test_a_bad_option_names_the_option():
    with pytest.raises(SettingsError, match=r"fa4\.implementation='nope'"):
        S.Settings().with_options({"fa4.implementation": "nope"})


@pytest.mark.parametrize("key", ["fa4.strickt", "max_autotune", "fa4."])
def test_an_unknown_option_names_the_known_ones(key):
    with pytest.raises(SettingsError, match=r"known are .*fa4\.strict"):
        S.Settings().with_options({key: True})


def test_options_are_split_by_prefix():
    ours, inductor = S.split_options({"fa4.strict": True, "max_autotune": True, "triton.cudagraphs": False})
    assert ours == {"fa4.strict": True} and inductor == {"max_autotune": True, "triton.cudagraphs": False}
    assert S.split_options(None) == ({}, {})


def test_arch_is_normalised():
    assert S.Settings.from_env({"FA4_INDUCTOR_TARGET_ARCH": "SM_90A"}).target_arch == "sm_90a"
    assert S.Settings.from_env({"FA4_INDUCTOR_TARGET_ARCH": ""}).target_arch is None
