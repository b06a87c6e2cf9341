"""An agent that mends one function: it shows the policy the function that the task names, and writes the line that comes
back. A program of the box: it knows the folder of its task, and a model by its address.
"""

import json
import os
import urllib.request

SHOTS = {
    '"""Smallest of all but the first 9 numbers."""\nreturn min(x[:-9])': "return min(x[9:])",
    '"""Largest of the first 9 numbers."""\nreturn min(x[:9])': "return max(x[:9])",
    '"""Length of the numbers above 9."""\nreturn len([n for n in x if n < 9])': "return len([n for n in x if n > 9])",
}


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def main():
    task = json.loads(os.environ["RONDEL_TASK"])
    os.chdir(task["workdir"])
    name = task["prompt"].split()[0]
    with open("lists.py") as file:
        lines = file.read().split("\n")
    first = lines.index(f"def {name}(x):")
    messages = []
    for shown, mended in SHOTS.items():
        messages += [{"role": "user", "content": f"Mend it.\n{shown}"}, {"role": "assistant", "content": mended}]
    about, line = (line.strip() for line in lines[first + 1 : first + 3])
    messages.append({"role": "user", "content": f"Mend it.\n{about}\n{line}"})
    lines[first + 2] = "    " + ask(messages).strip().partition("\n")[0]
    with open("lists.py", "w") as file:
        file.write("\n".join(lines))


main()
