"""What crosses a room: types, protocols, events, errors, registry, recipe. No torch."""
