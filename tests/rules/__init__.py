"""The rules that keep the hazards away, each with the text in the sources that is the rule, so that it can be taken out again.

`table` says which text, and which tests must then fail; `remove` takes one out at a time and runs them.
"""
