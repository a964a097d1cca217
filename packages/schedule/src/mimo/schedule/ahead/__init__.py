"""The schedule `ahead`, which weighs costs and fills gaps within a memory budget; `plugin` registers it."""
