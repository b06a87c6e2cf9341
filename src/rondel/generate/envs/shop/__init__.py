"""A shop with users who want something of it: database, tools, rules, tasks and simulated users."""
