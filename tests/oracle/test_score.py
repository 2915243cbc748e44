"""The score counts what it says: tables, requirements and the exit code, on made-up outcomes."""

import json
from dataclasses import replace

import pytest
import score
from mutants.outcome import Outcome
from planted import outcome as planted_outcome
from planted.outcome import Outcome as Planted

GOOD = [
    Outcome("a", "MXFP8", "convention", True, 1, (("scale-floor",),)),
    Outcome("b", "MXFP8", "corruption", True, 0, ()),
] * 30
MET = {
    "seconds": {"right": 0.4, "wrong": 2.0, "two faults": 1.2},
    "alarms": (1000, 1500, []),
    "peers": [("f", "p", "v", "wrong", "x", "x")],
}
#: What is planted and found, named and placed; with one of them wrong.
RIGHT = Planted("held", "x", True, (("a",),), "a", 1.0, True)
PLANTED = [RIGHT] * 200


@pytest.fixture
def scored(monkeypatch, capsys):
    """Function of outcomes and what else was counted: (exit code, the JSON document)."""

    def run(outcomes, seconds=MET["seconds"], alarms=MET["alarms"], peers=MET["peers"], planted=PLANTED):
        monkeypatch.setattr(score, "judge_mutants", lambda: outcomes)
        monkeypatch.setattr(score, "measure_speed", lambda: seconds)
        monkeypatch.setattr(score, "judge_planted", lambda: planted)
        monkeypatch.setattr(planted_outcome, "ACCEPTED", {"held": {"x": ("a",), "y": ()}})
        monkeypatch.setattr(score.variants, "count_false_alarms", lambda progress, tensors: alarms)
        monkeypatch.setattr(score.third_party, "third_party_results", lambda: peers)
        monkeypatch.setattr(score, "MUTANTS", dict.fromkeys("abcde", type("M", (), {"expected": ("scale-floor",)})))
        code = score.main(["--json"])
        document = json.loads(capsys.readouterr().out)
        assert score.main([]) == code
        text = capsys.readouterr().out
        assert text.count("MISSED") == sum(not r["met"] for r in document["requirements"])
        return code, document

    return run


def test_all_met(scored):
    code, document = scored(GOOD)
    assert code == 0
    assert document["families"][-1] == {
        "family": "all",
        "mutants": 60,
        "detected": 60,
        "conventions": 30,
        "named first": 30,
        "named second": 0,
        "named later": 0,
        "not named": 0,
        "corruptions": 30,
        "falsely named": 0,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"outcomes": GOOD[:59]},
        {"outcomes": [*GOOD, Outcome("c", "MXFP8", "corruption", False, 0, ())]},
        {"outcomes": [*GOOD, *[Outcome("d", "MXFP8", "convention", True, 2, (("x",), ("scale-floor",)))] * 4]},
        {"outcomes": [*GOOD, *[Outcome("e", "MXFP8", "corruption", True, 0, (("x",),))] * 4]},
        {"outcomes": GOOD, "seconds": {"right": 0.6, "wrong": 2.0, "two faults": 1.2}},
        {"outcomes": GOOD, "seconds": {"right": 0.4, "wrong": 8.1, "two faults": 1.2}},
        {"outcomes": GOOD, "seconds": {"right": 0.4, "wrong": 2.0, "two faults": 1.6}},
        {"outcomes": GOOD, "alarms": (1000, 1500, ["a rejection"])},
        {"outcomes": GOOD, "alarms": (999, 1500, [])},
        {"outcomes": GOOD, "planted": [*PLANTED, replace(RIGHT, found=False)]},
        {"outcomes": GOOD, "planted": [*PLANTED, *[replace(RIGHT, answers=())] * 150]},
        {"outcomes": GOOD, "planted": [*PLANTED, *[replace(RIGHT, overlap=0.5)] * 150]},
        {"outcomes": GOOD, "planted": [*PLANTED, *[replace(RIGHT, name="y")] * 3]},
        {"outcomes": GOOD, "peers": []},
        {"outcomes": GOOD, "peers": [("f", "p", "v", "wrong", "x", "y")]},
    ],
)
def test_one_requirement_missed(scored, change):
    code, document = scored(**change)
    assert code == 1
    assert sum(not requirement["met"] for requirement in document["requirements"]) == 1
