"""The HTTP API: OpenAI's shapes over the records and streams of the cells. One noun a file."""
