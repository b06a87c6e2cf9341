"""The engine of policies that answer in steps of all requests at once: points of a flow, blocks of masks."""
