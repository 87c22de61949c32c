"""The heads that models have, the kinds that they become, and how config.json says so."""
