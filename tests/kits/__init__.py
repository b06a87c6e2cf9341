"""What several test files share: fakes, tiny models, oracles, and hostile inputs."""
