"""Where ragkv meets other software: LangChain and MCP. Each loads its library alone."""
