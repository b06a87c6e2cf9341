"""A peer's config -> a recipe, and by name all that the recipe cannot say.

    text of theirs ──read──> {key: value} ──parts──> Line | Same | Gap ──translate──> Report ──> TOML and lists
                                              ^ defaults: <peer>.json

`<peer>.json` holds every key of one release of theirs with its default, and the names
that keys had before. What a key means here is told in `<peer>.py`; which algorithms exist
here is asked of the table when the command runs.
"""
