"""lm-evaluation-harness through `rondel serve` beside the same harness on transformers: the same numbers, question by question.

    pip install lm_eval tenacity aiohttp          in an environment that has rondel
    python benchmarks/peers/lm_eval_serve.py --model FOLDER --questions 60

Two tasks made here, without a hub: multiple choice (log-likelihoods of answers, by echo and logprobs) and answers written until
a line ends. Float32, greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHOICE = """task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WRITE = """task: write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false, temperature: 0.0, max_gen_toks: 12}}
metric_list: [{{metric: exact_match, ignore_case: true, ignore_punctuation: true}}]
"""
SHOWN = "Q: 2 + 3 =\nA: 5\nQ: The capital of Spain is\nA: Madrid\n"
FACTS = [
    ("The capital of France is", ["Paris", "Rome", "Oslo", "Berlin"]), ("The capital of Italy is", ["Rome", "Paris", "Lima", "Cairo"]),
    ("The opposite of hot is", ["cold", "warm", "red", "tall"]), ("A cat says", ["meow", "woof", "moo", "quack"]),
    ("Water freezes into", ["ice", "steam", "sand", "gold"]), ("The sun rises in the", ["east", "west", "north", "south"]),
    ("Bees make", ["honey", "milk", "paper", "iron"]), ("The color of grass is", ["green", "blue", "pink", "black"]),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder that transformers loads")
    parser.add_argument("--questions", type=int, default=60)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_tasks(place, a.questions)
        plain = evaluate(place, "hf", {"pretrained": a.model, "dtype": "float32", "device": "cpu"})
        with Served(a.model, place) as url:
            how = {"model": "evaluated", "base_url": f"{url}/v1/completions", "tokenizer": a.model, "num_concurrent": 4}
            served = evaluate(place, "local-completions", {**how, "tokenized_requests": True, "max_retries": 1})
    wrong = [task for task in plain["samples"] for i, (one, other) in enumerate(zip(plain["samples"][task], served["samples"][task])) if one != other]
    print(json.dumps({"transformers": plain["results"], "rondel serve": served["results"], "questions": a.questions, "different": len(wrong)}))
    sys.exit(bool(wrong))


def write_tasks(place: Path, n: int) -> None:
    rng, choice, write = random.Random(0), [], []
    for i in range(n):
        question, (right, *wrong) = FACTS[i % len(FACTS)] if i % 2 else (f"{rng.randint(1, 9)} + {rng.randint(1, 9)} =", ("", "", ""))
        if not right:
            total = eval(question.removesuffix("="))
            right, wrong = str(total), [str(total + d) for d in (1, 2, 5)]
        options = [right, *wrong]
        rng.shuffle(options)
        choice.append({"question": question, "choices": options, "answer": options.index(right)})
        write.append({"question": f"{SHOWN}Q: {question}\nA:", "target": right})
    for name, rows, text in (("choice", choice, CHOICE), ("write", write, WRITE)):
        path = place / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / f"{name}.yaml").write_text(text.format(rows=path))


def evaluate(place: Path, model: str, how: dict[str, Any]) -> dict[str, Any]:
    """-> scores by task, and of each question what was decided."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    done = lm_eval.simple_evaluate(
        model=model, model_args=how, tasks=["choice", "write"], batch_size=8,
        task_manager=TaskManager(include_path=str(place), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    scores = {task: {k: v for k, v in row.items() if isinstance(v, float)} for task, row in done["results"].items()}
    samples = {
        task: [(s["doc_id"], s["filtered_resps"] if task == "write" else [flag for _, flag in s["filtered_resps"]], s.get("acc"), s.get("exact_match")) for s in sorted(rows, key=lambda s: s["doc_id"])]
        for task, rows in done["samples"].items()
    }  # fmt: skip
    return {"results": scores, "samples": samples}


class Served:
    """`rondel serve` as long as it is needed."""

    def __init__(self, model: str, place: Path) -> None:
        self.port = place / "port"
        words = ["-m", "rondel", "serve", model, "--name", "evaluated", "--dtype", "float32", "--port", "0", "--port-file", str(self.port)]
        self.process = subprocess.Popen([sys.executable, *words], stdout=sys.stderr, env=os.environ)

    def __enter__(self) -> str:
        for _ in range(600):
            if self.port.exists():
                return f"http://127.0.0.1:{self.port.read_text().strip()}"
            if self.process.poll() is not None:
                raise SystemExit("rondel serve ended: its output says why")
            time.sleep(0.2)
        raise SystemExit("rondel serve does not listen after two minutes")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)


if __name__ == "__main__":
    main()
