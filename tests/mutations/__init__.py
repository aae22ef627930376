"""Mutation testing: one changed place at a time, and the tests that notice it.

    make mutations

`areas.toml` names the files of each area and the tests that cover them. The mutants are drawn from
these files with a fixed seed. A mutant that no test notices needs an entry in `survivors.toml`: the
test that was added for it, or the reason why no test can notice it.
"""
