"""The DRAM bundle cache: a set-associative directory, a frequency sketch, the policy, and the table of slots without entry."""
