"""A real tokenizer made on the spot, chat templates of the kinds that exist, and an engine of ten lines."""

from __future__ import annotations

from functools import lru_cache
from string import printable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rondel.core.types import Completion, Sampling
from rondel.generate.envs.chat import TokenChat

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREAMBLE = "You are a helpful assistant."
INJECTING = (  # Qwen2.5: a system message where none is given
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + PREAMBLE + "<|im_end|>\n{% endif %}" + CHATML
)
THINKING = (  # Qwen3: the thoughts of earlier turns are dropped, the last turn gets an empty thought
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% if loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (  # Llama 2, Mistral: user and assistant take turns; the answer ends with </s> and no line break
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system "
    "role') }}{% endif %}"
    "{% if (m['role'] == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') "
    "}}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] "
    "}}</s>{% endif %}{% endfor %}"
)
ENDING = (  # Phi 3: an end token behind every text that asks for no more
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
TEMPLATES = {
    "ending": ENDING,
    "chatml": CHATML,
    "injecting": INJECTING,
    "thinking": THINKING,
    "alternating": ALTERNATING,
}


@lru_cache
def tokenizer(template: str | None = "chatml") -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 entries over a few sentences, with ChatML's special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    text = [
        "what is three plus four? the answer is seven.\n\nlook again.\n",
        "system user assistant 12 345 + 67 =",
        PREAMBLE,
    ] * 4
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        text,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    end = {"alternating": "</s>", "ending": "<|endoftext|>"}.get(template or "", "<|im_end|>")
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end)
    made.chat_template = TEMPLATES[template] if template else None
    return made


def spaced_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    """BPE of characters and a few words that begins texts with a space, as Llama 2's does."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    special = ["<s>", "<|im_start|>", "<|im_end|>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=170, special_tokens=special, initial_alphabet=[*printable, "\u2581"], show_progress=False
    )
    bpe.train_from_iterator(["what is 3 + 4 = 7 seven x7 user is 7"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")


class Engine:
    """Says the given turns, each a list of token ids; the version counts the turns."""

    def __init__(self, *turns: list[int], finish: str = "stop") -> None:
        self.turns, self.finish, self.requests = list(turns), finish, []

    async def generate(self, request):
        tokens = self.turns[len(self.requests)]
        self.requests.append(request)
        n = len(tokens)
        return Completion(tokens, [-0.5] * n, [len(self.requests)] * n, self.finish, timings={"decode": 0.5})


def chat(tok, engine, *, max_context=4096, max_tokens=64, **more) -> TokenChat:
    return TokenChat(
        tok,
        engine.generate,
        sampling=Sampling(max_tokens=max_tokens),
        key=lambda turn: 1000 + turn,
        max_context=max_context,
        **more,
    )
