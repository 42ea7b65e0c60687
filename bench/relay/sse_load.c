/* Asks for chat completions over HTTP/1.1, one kept-alive connection per stream, and times tokens.
 *
 *   sse_load [stream=0] [key=TEXT] and the options of load.h
 *
 * Tokens are counted by their stamps; an answer that is not streamed holds one. A request that does
 * not get 200, or ends with another number of tokens than it asked for, is an error.
 */
#include "load.h"

#define RECEIVE_MOST 65536

struct stream {
  int fd;
  struct bytes in;
  size_t head;    /* Length of the answer's head; 0 until it has come. */
  size_t scanned; /* Bytes of the answer that were searched for stamps. */
  long length;    /* Of the body; -1 when it is chunked. */
  uint64_t asked_ns;
  unsigned tokens;
  bool failed;
};

static struct load load;
static int poller;
static bool streamed;
static const char *key;

static void open_connection(struct stream *stream) {
  stream->fd = connect_to(load.port);
  poll_for(poller, EPOLL_CTL_ADD, stream->fd, EPOLLIN, stream);
}

static void ask(struct stream *stream) {
  static char *prompt, *body;
  char head[1024];
  if (prompt == NULL) {
    prompt = need(malloc(PROMPT_MOST(&load)));
    body = need(malloc(PROMPT_MOST(&load) + 256));
  }
  write_prompt(&load, prompt);
  int length = sprintf(body,
                       "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],"
                       "\"max_tokens\":%u,\"stream\":%s}",
                       prompt, load.tokens, streamed ? "true" : "false");
  int head_length = snprintf(head, sizeof head,
                            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost:%d\r\n"
                            "user-agent: OpenAI/Python 2.0.0\r\naccept: application/json\r\n"
                            "content-type: application/json\r\n"
                            "authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n",
                            load.port, key, length);
  struct bytes out = {0};
  bytes_put(&out, head, (size_t)head_length);
  bytes_put(&out, body, (size_t)length);
  stream->in.start = stream->in.end = 0;
  stream->head = stream->scanned = 0;
  stream->tokens = 0;
  stream->failed = false;
  stream->asked_ns = now_ns();
  /* The socket's buffer is empty and larger than a request. A connection that the server has
   * closed meanwhile is seen when it is read. */
  if (bytes_flush(&out, stream->fd) == BLOCKED) die("a request does not fit a socket's buffer");
  bytes_free(&out);
}

static void fail(struct stream *stream, const char *problem) {
  count_error(&load, problem, stream->in.data + stream->in.start, bytes_length(&stream->in));
  stream->failed = true;
}

/* Reads the head of the answer, once it is there. */
static void take_head(struct stream *stream) {
  const uint8_t *start = stream->in.data + stream->in.start;
  const uint8_t *blank = memmem(start, bytes_length(&stream->in), "\r\n\r\n", 4);
  if (blank == NULL) return;
  stream->head = stream->scanned = (size_t)(blank - start) + 4;
  char *fields = need(strndup((const char *)start, stream->head));
  const char *length = strcasestr(fields, "\ncontent-length:");
  stream->length = length != NULL ? atol(length + 16) : -1;
  if (strncmp(fields, "HTTP/1.1 200", 12) != 0) fail(stream, "an answer of another status");
  free(fields);
}

static void take_stamps(struct stream *stream, uint64_t now) {
  const uint8_t *start = stream->in.data + stream->in.start;
  const uint8_t *end = start + bytes_length(&stream->in), *at = start + stream->scanned;
  while ((at = memchr(at, '~', (size_t)(end - at))) != NULL && end - at >= STAMP_LENGTH) {
    uint64_t sent_ns = read_stamp(at);
    if (sent_ns == 0) {
      at++;
      continue;
    }
    at += STAMP_LENGTH;
    if (stream->tokens++ == 0) count_first(&load, now, stream->asked_ns, sent_ns);
    count_token(&load, now, sent_ns);
  }
  stream->scanned = (size_t)((at != NULL ? at : end) - start);
}

static bool has_ended(const struct stream *stream) {
  size_t count = bytes_length(&stream->in);
  if (stream->length >= 0) return count >= stream->head + (size_t)stream->length;
  /* Within a chunk of events, a blank line never follows a zero. */
  const uint8_t *end = stream->in.data + stream->in.end;
  return count >= stream->head + 5 && memcmp(end - 5, "0\r\n\r\n", 5) == 0;
}

static void receive(struct stream *stream) {
  if (bytes_receive(&stream->in, stream->fd, RECEIVE_MOST) < 0) {
    fail(stream, "a connection was closed");
    close(stream->fd);
    open_connection(stream);
    ask(stream);
    return;
  }
  uint64_t now = now_ns();
  if (stream->head == 0) take_head(stream);
  if (stream->head == 0) return;
  take_stamps(stream, now);
  if (!has_ended(stream)) return;
  unsigned expected = streamed ? load.tokens : 1;
  if (!stream->failed && stream->tokens != expected) fail(stream, "an answer of another length");
  if (!stream->failed) count_request(&load, stream->asked_ns);
  ask(stream);
}

int main(int count, char **arguments) {
  struct epoll_event events[512];
  signal(SIGPIPE, SIG_IGN);
  load_read(&load, count, arguments);
  streamed = atoi(option(count, arguments, "stream", "1")) != 0;
  key = option(count, arguments, "key", "none");
  poller = epoll_create1(0);
  struct stream *streams = need(calloc(load.streams, sizeof *streams));
  load.began_ns = now_ns();
  while (!load_is_over(&load)) {
    while (load_may_start(&load)) {
      struct stream *stream = &streams[load.started++];
      open_connection(stream);
      ask(stream);
    }
    int ready = wait_events(poller, events, 512, load_next_ns(&load));
    for (int i = 0; i < ready; i++) receive(events[i].data.ptr);
  }
  load_print(&load);
  return 0;
}
