"""Episode graphs with credit for each role: a debate with a judge, and a proposer with a solver."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kits.chat import Engine, chat, tokenizer
from rondel.core.config.environment import DebateConfig, ProposerSolverConfig
from rondel.core.errors import DataError
from rondel.core.types import Completion, Sampling, Task
from rondel.generate.envs.debate import Debate, read_verdict
from rondel.generate.envs.episode import assign_parents, join_episodes, share_scores
from rondel.generate.envs.proposer_solver import ProposerSolver, arithmetic, middle_reward, same_answer

QUESTION = Task("d/1", "debate", {"prompt": "Is 7 prime?", "answer": "yes", "wrong": "no"})


def play(env, task, *says):
    tok = tokenizer("chatml")
    engine = Engine(*([*tok.encode(text, add_special_tokens=False), tok.eos_token_id] for text in says))
    found = asyncio.run(env.run(task, chat(tok, engine, max_context=4000, max_tokens=200)))
    return found, [tok.decode(request.tokens) for request in engine.requests]


# -- debate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2])
def test_each_side_reads_the_other_and_the_judge_reads_both(rounds):
    env = Debate(rounds=rounds)
    says = [f"point {turn}" for turn in range(2 * rounds)]
    (judge, first, second), asked = play(env, QUESTION, *says, "It is A. Surely B.")
    assert [t.agent for t in (judge, first, second)] == ["judge", "first", "second"] == [env.agents[2], *env.agents[:2]]
    own, other = env.sides(QUESTION)
    assert f"Argue that the answer is: {own}" in asked[0] and f"Argue that the answer is: {other}" in asked[1]
    assert "point 0" in asked[1] and "point 1" not in asked[1]
    assert all(f"{'AB'[turn % 2]}: point {turn}" in asked[-1] for turn in range(2 * rounds))
    assert "Argue that" not in asked[-1], "the judge does not read what debaters were told"
    if rounds == 2:
        assert "point 1" in asked[2] and asked[2].startswith(asked[0].rstrip()[:40])


@pytest.mark.parametrize(("verdict", "taken"), [("A", 0), ("So it is B.", 1), ("", None), ("ABBA", None)])
def test_the_debate_adds_up_to_zero_and_the_judge_earns_the_truth(verdict, taken):
    (judge, *debaters), _ = play(Debate(), QUESTION, "x", "y", verdict)
    right = Debate().sides(QUESTION).index("yes")
    earned = [t.score.value for t in debaters]
    assert sum(earned) == 0.0 and earned == ([0, 0] if taken is None else [1, -1] if taken == 0 else [-1, 1])
    assert judge.score.value == float(taken == right) and judge.score.parts == {"decided": float(taken is not None)}
    assert [t.score.parts["honest"] for t in debaters] == [float(place == right) for place in (0, 1)]


def test_points_of_a_judge_are_shares():
    assert read_verdict("I give 7 4", "judged") == (0.7, 0.4)
    assert read_verdict("99 2.5", "judged") == (1.0, 0.25)
    assert read_verdict("7", "judged") is None and read_verdict("v1.2 is 3", "judged") is None
    (judge, *debaters), _ = play(Debate(score="judged"), QUESTION, "x", "y", "9 1")
    assert [t.score.value for t in debaters] == [0.9, 0.1]
    assert judge.score.value == float(Debate().sides(QUESTION)[0] == "yes")


def test_the_sides_are_those_of_the_task_and_differ_between_tasks():
    tasks = [Task(f"d/{i}", "debate", QUESTION.data) for i in range(40)]
    sides = [Debate().sides(task)[0] for task in tasks]
    assert sides == [Debate().sides(task)[0] for task in tasks] and 8 < sides.count("yes") < 32
    with pytest.raises(DataError, match='needs an "answer" and a "wrong" one'):
        Debate().sides(Task("d", "debate", {"prompt": "?", "answer": "yes"}))


@pytest.mark.parametrize("score", ["zero_sum", "judged"])
def test_gold_of_a_debate_deserves_the_best_score(score):
    env = Debate(rounds=2, score=score)
    (judge, *_), _ = play(env, QUESTION, *env.gold(QUESTION))
    assert judge.score.value == 1.0 and len(env.gold(QUESTION)) == env.turns


# -- proposer and solver ---------------------------------------------------------------------------


class Both:
    """An engine for a proposer and its solvers, by what they read."""

    def __init__(self, problem, *answers):
        self.problem, self.answers, self.tok = problem, list(answers), tokenizer("chatml")

    async def generate(self, request):
        read = self.tok.decode(request.tokens)
        text = self.answers.pop(0) if "=" in read else self.problem
        tokens = [*self.tok.encode(text, add_special_tokens=False), self.tok.eos_token_id]
        return Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), "stop")


def propose(problem, *answers, **settings):
    env = ProposerSolver(arithmetic, attempts=len(answers) or 4, **settings)
    talk = chat(tokenizer("chatml"), Both(problem, *answers), max_tokens=200)
    return asyncio.run(env.run(Task("p", "x", {"prompt": "Write a sum.", "answer": ""}), talk))


@pytest.mark.parametrize(
    ("answers", "reward"), [("7777", 0.0), ("7770", 0.5), ("7700", 1.0), ("7000", 0.5), ("0000", 0.0)]
)
def test_the_proposer_earns_most_in_the_middle(answers, reward):
    proposer, *solvers = propose("3 + 4", *answers)
    assert proposer.agent == "proposer" and proposer.score.value == reward
    assert proposer.score.parts == {"valid": 1.0, "solved": answers.count("7") / 4}
    assert [t.score.parts["correct"] for t in solvers] == [float(one == "7") for one in answers]
    assert sum(t.score.value for t in solvers) == pytest.approx(0.0), "each less the mean of the others"


def test_the_reward_of_a_solve_rate():
    assert [middle_reward(p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 0.5, 1.0, 0.5, 0.0]


def test_solvers_of_one_problem_are_roots_of_their_own():
    """So each is a row of its own in the baseline, and none shares the score of another."""
    episodes = [
        assign_parents(propose("3 + 4", *"7700")),
        assign_parents(propose("2 * 3", *"6666", solver_score="plain")),
    ]
    for episode in episodes:
        share_scores(episode)
    group = join_episodes(episodes)
    assert [t.parent for t in group] == [None] * 10
    assert [t.score.value for t in group if t.agent == "solver"][4:] == [1.0] * 4


@pytest.mark.parametrize("problem", ["hello", "", "1 / 0", "9 ** 9 ** 9", "(" * 5000, "import os"])
def test_what_is_no_problem_earns_nothing_and_is_asked_of_nobody(problem):
    [proposer] = propose(problem)
    assert proposer.score.value == 0.0 and proposer.score.parts == {"valid": 0.0}


def test_a_debate_before_a_judge_elsewhere_scores_itself_too():
    """Else a judge that fails behind the budget leaves what the debaters said to task.reward."""
    judged = Debate(judge="http://127.0.0.1:1/v1", judge_model="m")
    assert judged.scores_itself and judged.agents == ("first", "second")


def test_a_task_with_an_answer_is_for_the_solver_alone():
    env = ProposerSolver(arithmetic)
    task = Task("p", "x", {"prompt": "3 + 4 =", "answer": "7"})
    for said, value in (("It is 7", 1.0), ("8", 0.0)):
        [found], _ = play(env, task, said)
        assert (found.agent, found.score.value) == ("solver", value)


def test_answers_are_compared_as_numbers_where_they_are():
    assert same_answer("so\nit is 7.0.", "7") and same_answer("14/2", "7") and not same_answer("17", "7")
    assert not same_answer("", "7") and not same_answer("1/0", "7") and same_answer("Paris", "paris")
    assert arithmetic("A sum:\n3 + 4 * 2 =\n") == ("3 + 4 * 2 =", "11")


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="judge_model names the model"):
        DebateConfig(judge="http://127.0.0.1:1/v1")
    with pytest.raises(ValueError, match='it is "policy", or an address'):
        DebateConfig(judge="oracle")
    with pytest.raises(ValueError):
        ProposerSolverConfig(solver_score="square")


def test_rondel_check_tries_what_has_a_gold_answer():
    from rondel.checks.score_check import check_scores

    def found(env, *tasks):
        info = SimpleNamespace(tokenizer=tokenizer("chatml"), max_context=4000, sight=None)
        job, own = SimpleNamespace(task=SimpleNamespace(system=None)), SimpleNamespace(train=list(tasks))
        said = Sampling(max_tokens=100)
        parts = SimpleNamespace(env=env, model_info=info, tasks=own, job=job, sampling=said, pool=None)
        return asyncio.run(check_scores(parts))

    assert all(f.ok for f in found(Debate(), QUESTION))
    sums = [Task("p", "x", {"prompt": "3 + 4 =", "answer": "7"}), Task("q", "x", {"prompt": "3 + 5 =", "answer": "8"})]
    assert all(f.ok for f in found(ProposerSolver(arithmetic), *sums))
    [told] = found(ProposerSolver(arithmetic), Task("p", "x", {"prompt": "Write a sum.", "answer": ""}))
    assert told.ok and "not tried" in told.message
