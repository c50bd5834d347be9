"""Between HTTP and the engine: what is loaded, who may call, how requests wait, and who is told of
a judgement."""
