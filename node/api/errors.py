"""What a request is refused with: a status and OpenAI's error body. What cannot be done is said, with the
name of the field; nothing is ignored in silence."""

from typing import Any


class ApiError(Exception):
    """An answer that is no completion."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int = 0,
    ) -> None:
        """`param` is the field that it is about; `retry_after_s` tells the client when to come back."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad(param: str, message: str, *, code: str | None = None) -> ApiError:
    """400 for one field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def too_long(tokens: int, longest: int, param: str) -> ApiError:
    """400 for a prompt that leaves no room; the words are those that clients look for."""
    return ApiError(
        400,
        f"This model's maximum context length is {longest} tokens, and the prompt has {tokens}: "
        "shorten it, or raise engine.max_model_len of the server",
        param=param,
        code="context_length_exceeded",
    )
