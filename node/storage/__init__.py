"""State that survives a restart: chunk store, ledger, the files of a run."""
