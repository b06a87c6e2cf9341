"""Text from outside: valid Unicode, control tokens that stay text, repetition. No torch."""
