"""Head profiles: the artifact, its importers, and how profiles are compared, merged and shown."""
