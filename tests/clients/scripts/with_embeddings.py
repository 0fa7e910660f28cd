"""A script that reports the embeddings that langchain-openai and litellm read.

Argument: the URL.
"""

from __future__ import annotations

import sys

import litellm
from clients.asked import MODEL, PROMPTS
from clients.scripts.report import report
from langchain_openai import OpenAIEmbeddings


def main(url: str) -> None:
    # Sends texts, not ids of OpenAI's tokenizer, as its users do with other servers.
    langchain = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
    )
    answer = litellm.embedding(
        model=f"openai/{MODEL}", input=PROMPTS, api_base=f"{url}/v1", api_key="none"
    )
    report(
        {
            "langchain": langchain.embed_documents(PROMPTS),
            "langchain_query": langchain.embed_query(PROMPTS[0]),
            "litellm": [item["embedding"] for item in answer.data],
            "litellm_tokens": answer.usage.prompt_tokens,
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
