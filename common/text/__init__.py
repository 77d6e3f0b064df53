"""Translates chat messages to token ids, and an answer's ids to text and calls.

    messages ─► chat_messages ─► chat_template ─► tokens ─► ids ─► the model ─► ids ─► tokens ─► text, tool_calls

Its files:

    tokens.py           renders messages as ids, and ids as text
    chat_messages.py    checks chat messages and tools in OpenAI's form
    chat_template.py    compiles a base model's chat template
    special_tokens.py   finds the special tokens of a tokenizer
    examples.py         reads a job's rows: prompts, and examples of supervised jobs with the tokens that are learned
    tool_calls.py       parses the calls in a model's turn
    grammars.py         makes the grammars that answers follow: JSON of a schema, or one tool call
    model_folder.py     reads the text files of a base model's folder, `marlaas.json` included
"""
