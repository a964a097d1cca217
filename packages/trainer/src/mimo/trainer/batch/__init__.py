"""The samples of a step: which tokens, rows and items each microbatch has, and where they lie."""
