"""An engine of your own: `engine.kind = "my_engine:BehindGateway"`, `engine.url = "http://gateway:8000"`.

An engine is a driver of a server with six short methods (`ServerDriver` in rondel/generate/engine/foreign.py). One that
differs little from SGLang, vLLM or `rondel serve` inherits the rest.
"""

from rondel.generate.engine.sglang import SglangServer


class BehindGateway(SglangServer):
    """SGLang under a path of a gateway that lets through no more than 8,192 tokens a request."""

    name = "SGLang behind a gateway"
    blind = "the gateway forwards text alone"

    def __init__(self, url):
        super().__init__(f"{url.rstrip('/')}/llm")

    def open(self, sampling):
        return min(8192, super().open(sampling))
