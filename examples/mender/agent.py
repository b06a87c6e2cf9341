"""An agent that mends one function: it shows the policy the function that the task names, and writes the line that comes
back. A program of the box: it knows the folder of its task, and a model by its address.
"""

import json
import os
import urllib.request

ASKED = """One line of Python, nothing else. It begins with return. Correct the last line:

def {name}(x):
    {about}
    {line}"""
SHOWN = ASKED.format(name="kappa", about='"""The larger of x and 20."""', line="return max(x, 21)"), "return max(x, 20)"


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
    with open("numbers_of.py") as file:
        lines = file.read().split("\n")
    first = lines.index(f"def {name}(x):")
    about, line = (line.strip() for line in lines[first + 1 : first + 3])
    asked, mended = SHOWN
    said = ask(
        [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": mended},
            {"role": "user", "content": ASKED.format(name=name, about=about, line=line)},
        ]
    )
    lines[first + 2] = "    " + said.strip().partition("\n")[0]
    with open("numbers_of.py", "w") as file:
        file.write("\n".join(lines))


main()
