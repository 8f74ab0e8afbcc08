"""Makes and checks links to the peers that the launcher names, and notices when one is lost."""
