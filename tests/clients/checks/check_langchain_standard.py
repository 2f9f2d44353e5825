"""LangChain's standard tests of its classes for OpenAI's two APIs, Anthropic's and Ollama's, with the default model."""

import os

os.environ.setdefault("LANGCHAIN_TESTS_USER_AGENT", "tidemill")

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

WITHOUT_A_GRAMMAR = "a model of 135M parameters calls no tool unless it must"


class Standard(ChatModelIntegrationTests):
    __test__ = False
    url: str
    supports_anthropic_inputs = supports_image_inputs = supports_pdf_inputs = supports_audio_inputs = False

    @pytest.fixture(autouse=True)
    def _served_at(self, url):
        type(self).url = url

    @pytest.mark.xfail(reason=WITHOUT_A_GRAMMAR)
    def test_agent_loop(self, model):
        super().test_agent_loop(model)


class TestOpenAI(Standard):
    __test__ = True
    chat_model_class = ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": "smollm2", "base_url": f"{self.url}/v1", "api_key": "none", "max_tokens": 256, "stream_usage": True}


class TestOpenAIResponses(TestOpenAI):
    @property
    def chat_model_params(self):
        return super().chat_model_params | {"use_responses_api": True}


class TestAnthropic(Standard):
    __test__ = True
    chat_model_class = ChatAnthropic

    @property
    def chat_model_params(self):
        return {"model": "smollm2", "base_url": self.url, "api_key": "none", "max_tokens": 256}


class TestOllama(Standard):
    __test__ = True
    chat_model_class = ChatOllama
    has_tool_choice = False  # Ollama's API has none

    @property
    def chat_model_params(self):
        return {"model": "smollm2", "base_url": self.url, "num_predict": 256, "temperature": 0}
