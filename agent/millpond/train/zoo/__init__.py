"""Models that come with millpond."""
