"""What runs are made of is remembered, and never the wrong thing."""

from __future__ import annotations

import copy

import pytest

from kitestring_api.errors import UserMistakeError
from kitestring_operator import identity, parts, rollouts
from kitestring_operator.blueprint import blueprint, is_trainer_job, with_trainer
from tests.operator.parts.rendering import CASES, context, documents


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_parts_make(case: str) -> None:
    seen = context(*documents(case))
    made = [identity.with_spec_hash(item) for item in (*parts.run_objects(seen), *rollouts.worker_objects(seen))]
    (trainer,) = [item for item in made if is_trainer_job(item)]
    made.remove(trainer)
    assert list(blueprint(seen)) == [*made, trainer], "the trainer last: with it a run has started"
    assert blueprint(context(*documents(case))) is blueprint(seen), "equal contexts, one making"


def test_a_trainer_says_which_one_it_is() -> None:
    seen = context(*documents("verl-cpu"))
    plan, third, again = blueprint(seen), *(with_trainer(seen, (("number", "3"),)) for _ in range(2))
    assert third is again and len(third) == len(plan)
    changed = [(before, after) for before, after in zip(plan, third, strict=True) if before is not after]
    ((before, after),) = changed
    assert is_trainer_job(before) and after["metadata"]["annotations"]["number"] == "3"
    assert after == identity.with_spec_hash(after) != identity.with_spec_hash(before)
    fourth = with_trainer(seen, (("number", "4"),))
    assert [item["metadata"]["annotations"]["number"] for item in fourth if is_trainer_job(item)] == ["4"]


def test_a_change_is_made_anew() -> None:
    run, pool = documents("verl-cpu")
    first = blueprint(context(run, pool))
    changed = copy.deepcopy(run)
    changed["spec"]["gateway"] = {"replicas": 7}
    sizes = {
        item["metadata"]["name"]: item["spec"].get("replicas")
        for item in blueprint(context(changed, pool))
        if item["kind"] == "StatefulSet"
    }
    assert 7 in sizes.values()
    assert blueprint(context(run, pool)) == first
    assert blueprint(context(run, pool, namespace="team-b"))[0]["metadata"]["namespace"] == "team-b"


def test_what_cannot_be_made_is_said_each_time() -> None:
    run, pool = documents("verl-cpu")
    run["spec"]["gateway"] = {"template": {"spec": {"containers": [{"name": "gateway", "$patch": "delete"}]}}}
    for _ in range(2):
        with pytest.raises(UserMistakeError, match="gateway"):
            blueprint(context(run, pool))
