"""Datasets: their rows, the prompts made from them, and the order in which prompts are taken.

Start with `rows.load_rows` (from local data, read by `files`, or from the hub), then
`prompts.make_prompts` and `prompts.PromptStream`. `streaming` reads rows while a run trains, and
`stored_completions` reads files of completions. Imports only the configuration and the records.
"""
