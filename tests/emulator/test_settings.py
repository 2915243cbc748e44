"""What the software GPU is told to be, and when it is too late to tell it."""

import pytest

from cuda_kernels.emulator import Settings, device_for, loading, settings


def test_each_generation_is_a_device_where_nobody_says():
    made = Settings()
    assert made.targets == ("sm_90", "sm_80", "sm_100a", "sm_120a")
    assert made.capabilities == ((9, 0), (8, 0), (10, 0), (12, 0))
    assert [made.device_of(target) for target in ("sm_90", "sm_90a", "sm_80", "sm_100", "sm_120a")] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"targets": "sm_90"}, TypeError, "targets must be a tuple of names, one for each device; got 'sm_90'"),
        ({"targets": ()}, ValueError, "targets must name 1 to 16 devices; got 0"),
        ({"targets": ("sm_90",) * 17}, ValueError, "targets must name 1 to 16 devices; got 17"),
        ({"targets": ("sm_90", "sm_91")}, ValueError, r"targets\[1\] must be one of 'sm_75', .*; got 'sm_91'"),
        ({"perturb": -1}, ValueError, "perturb must be an integer in \\[0, 2147483648\\); got -1"),
        ({"perturb": True}, TypeError, "perturb must be an integer; got True"),
        ({"deferred": 1}, TypeError, "deferred must be True or False; got 1"),
    ],
)
def test_settings_are_checked(given, error, text):
    with pytest.raises(error, match=text):
        Settings(**given)


def test_device_of_a_target():
    assert device_for("sm_100a") == 2
    with pytest.raises(
        ValueError, match="target must be one of the devices', sm_90, sm_80, sm_100a, sm_120a; got 'sm_75'"
    ):
        device_for("sm_75")
    with pytest.raises(ValueError, match=r"target must be one of 'sm_75', .*; got 'h100'"):
        device_for("h100")


def test_targets_are_fixed_once_cuda_is_used(driver):
    with pytest.raises(
        RuntimeError, match=r"targets must stay as they are once CUDA is used, \('sm_90', .*got \('sm_80',\)"
    ):
        loading.behaviour(targets=("sm_80",))
    assert loading.settings().targets == settings.DEFAULT_TARGETS
    loading.behaviour(targets=("sm_90a", "sm_80", "sm_100", "sm_120"))  # the same devices


def test_behaviour_returns_the_settings_before():
    before = loading.behaviour(deferred=True)
    assert not before.deferred
    assert loading.behaviour(deferred=False).deferred
