"""New models under a budget: shapes by strategy, what they cost, and configurations that can be trained.

Nothing is kept, because there is nothing yet: a design is a configuration that `from_config` builds and
`headwise train` trains. Importing this is light; torch is imported when a design is made.
"""
