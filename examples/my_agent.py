"""An agent of somebody else's: `env = "gateway"`, `agent = "my_agent:solve"`. It knows
nothing of Rondel but an address and a key.

What it returns is the score of its episode; one that returns nothing leaves that to the run's reward.
"""

from openai import OpenAI

# made once, since that takes 30 ms; episodes share its connections, each with its own key
CLIENT = OpenAI(api_key="none")


def solve(task, base_url, api_key):
    """Asks, and asks once more if the answer is wrong: half a point then."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": task.data["prompt"]}]
    for worth in (1.0, 0.5):
        reply = client.chat.completions.create(model="policy", messages=messages)
        said = reply.choices[0].message.content or ""
        if said.strip() == str(task.data["answer"]):
            return worth
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": " no "}]
    return 0.0
