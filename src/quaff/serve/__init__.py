"""A model over HTTP: the APIs of OpenAI, and what an operator needs. Needs the packages of the extra `serve`."""
