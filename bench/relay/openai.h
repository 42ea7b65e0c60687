/* Answers of the OpenAI chat protocol, of the shape and size that vLLM gives. */
#ifndef OPENAI_H
#define OPENAI_H

#include "common.h"

#define SSE_TYPE "text/event-stream; charset=utf-8"
#define SSE_DONE "data: [DONE]\n\n"

#define ANSWER_ID "chatcmpl-5f0c1d2e3a4b49678899aabbccddeeff"

static const char EVENT_HEAD[] =
    "data: {\"id\":\"" ANSWER_ID "\",\"object\":\"chat.completion.chunk\","
    "\"created\":1790000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"";
static const char EVENT_TAIL[] = " tok\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
static const char EVENT_LAST_TAIL[] = " tok\"},\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n";

#define EVENT_MOST 320

/* Writes the event of one token and returns its length, at most EVENT_MOST. */
static inline size_t write_event(uint8_t *at, bool last) {
  const char *tail = last ? EVENT_LAST_TAIL : EVENT_TAIL;
  size_t tail_length = last ? sizeof EVENT_LAST_TAIL - 1 : sizeof EVENT_TAIL - 1;
  uint8_t *end = at;
  memcpy(end, EVENT_HEAD, sizeof EVENT_HEAD - 1);
  end += sizeof EVENT_HEAD - 1;
  write_stamp(end, now_ns());
  end += STAMP_LENGTH;
  memcpy(end, tail, tail_length);
  return (size_t)(end + tail_length - at);
}

#define DOCUMENT_MOST(tokens) (1024 + 4 * (size_t)(tokens))

/* Writes a whole answer that is not streamed and returns its length. */
static inline size_t write_document(char *at, unsigned tokens) {
  char *end = at;
  end += sprintf(end,
                 "{\"id\":\"" ANSWER_ID "\",\"object\":\"chat.completion\","
                 "\"created\":1790000000,\"model\":\"m\",\"choices\":[{\"index\":0,"
                 "\"message\":{\"role\":\"assistant\",\"content\":\"");
  write_stamp((uint8_t *)end, now_ns());
  end += STAMP_LENGTH;
  for (unsigned i = 0; i < tokens; i++, end += 4) memcpy(end, " tok", 4);
  end += sprintf(end,
                 "\",\"refusal\":null,\"tool_calls\":[],\"reasoning\":null},\"logprobs\":null,"
                 "\"finish_reason\":\"stop\",\"stop_reason\":null}],\"service_tier\":null,"
                 "\"system_fingerprint\":null,\"usage\":{\"prompt_tokens\":250,"
                 "\"total_tokens\":%u,\"completion_tokens\":%u,\"prompt_tokens_details\":null}}",
                 250 + tokens, tokens);
  return (size_t)(end - at);
}

static inline bool asks_to_stream(const uint8_t *body, size_t count) {
  return memmem(body, count, "\"stream\":true", 13) != NULL ||
         memmem(body, count, "\"stream\": true", 14) != NULL;
}

#endif
