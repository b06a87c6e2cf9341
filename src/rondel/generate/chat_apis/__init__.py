"""What OpenAI's and Anthropic's APIs say, read and written the same way by the gateway of agents and by `rondel
serve`.
"""
