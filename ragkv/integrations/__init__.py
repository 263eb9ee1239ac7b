"""Where ragkv meets other software: LangChain, vLLM and Ray. Each loads its library alone."""
