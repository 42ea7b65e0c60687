/* A back end that speaks the OpenAI protocol over HTTP/1.1 and costs little.
 *
 *   sse_backend listen=PORT...
 *
 * It answers every POST like vLLM, at the pace that the prompt asks for, one chunk per event, and
 * every GET with what routers ask a worker about itself.
 */
#include "openai.h"
#include "pacing.h"

#define RECEIVE_MOST 65536

struct connection {
  struct paced paced;
  int fd;
  struct bytes in, out;
  struct pace pace;
  unsigned sent;
  bool writing;
};

static int poller;
static struct heap due;

static void put_chunk(struct bytes *out, const void *data, size_t length) {
  uint8_t *at = bytes_reserve(out, length + 16);
  int head = sprintf((char *)at, "%zx\r\n", length);
  memcpy(at + head, data, length);
  memcpy(at + head + length, "\r\n", 2);
  out->end += (size_t)head + length + 2;
}

/* Sends the next token, and the end after the last. True when there is more to come. */
static bool step(struct connection *connection) {
  uint8_t event[EVENT_MOST];
  bool last = ++connection->sent == connection->pace.tokens;
  put_chunk(&connection->out, event, write_event(event, last));
  if (!last) return true;
  put_chunk(&connection->out, SSE_DONE, sizeof SSE_DONE - 1);
  bytes_text(&connection->out, "0\r\n\r\n");
  return false;
}

static void put_json(struct bytes *out, const char *document, size_t length) {
  char head[128];
  int count = snprintf(head, sizeof head,
                       "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
                       "content-length: %zu\r\n\r\n",
                       length);
  bytes_put(out, head, (size_t)count);
  bytes_put(out, document, length);
}

static void answer(struct connection *connection, bool is_post, const uint8_t *body,
                   size_t length) {
  static const char about[] =
      "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1,"
      "\"owned_by\":\"vllm\",\"max_model_len\":4096}],\"model_path\":\"m\","
      "\"served_model_name\":\"m\",\"version\":\"0.32.0\",\"status\":\"ok\"}";
  if (!is_post) {
    put_json(&connection->out, about, sizeof about - 1);
    return;
  }
  connection->pace = find_pace(body, length);
  if (!asks_to_stream(body, length)) {
    char *document = need(malloc(DOCUMENT_MOST(connection->pace.tokens)));
    put_json(&connection->out, document, write_document(document, connection->pace.tokens));
    free(document);
    return;
  }
  bytes_text(&connection->out,
             "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: " SSE_TYPE
             "\r\ntransfer-encoding: chunked\r\n\r\n");
  connection->sent = 0;
  if (connection->pace.pace_ns == 0) {
    while (step(connection)) continue;
    return;
  }
  connection->paced.due_ns = first_due_ns(&connection->pace);
  if (!connection->pace.together) {
    connection->paced.due_ns += connection->pace.pace_ns;
    if (!step(connection)) return;
  }
  heap_add(&due, &connection->paced);
}

/* Answers the next whole request; false when there is none yet. */
static bool take_request(struct connection *connection) {
  struct bytes *in = &connection->in;
  const uint8_t *start = in->data + in->start;
  const uint8_t *blank = memmem(start, bytes_length(in), "\r\n\r\n", 4);
  if (blank == NULL) return false;
  size_t head = (size_t)(blank - start) + 4, length = 0;
  char *fields = need(strndup((const char *)start, head));
  const char *announced = strcasestr(fields, "\ncontent-length:");
  bool chunked = strcasestr(fields, "\ntransfer-encoding: chunked") != NULL;
  if (announced != NULL) length = strtoul(announced + 16, NULL, 10);
  free(fields);
  if (chunked) {
    const uint8_t *end = memmem(start + head, bytes_length(in) - head, "0\r\n\r\n", 5);
    if (end == NULL) return false;
    length = (size_t)(end - start) + 5 - head;
  }
  if (bytes_length(in) < head + length) return false;
  in->start += head + length;
  answer(connection, start[0] == 'P', start + head, length);
  return true;
}

static void forget(struct connection *connection) {
  heap_remove(&due, &connection->paced);
  close(connection->fd);
  bytes_free(&connection->in);
  bytes_free(&connection->out);
  free(connection);
}

static void flush(struct connection *connection) {
  /* What a broken connection still has to send goes when its end is read. */
  bool blocked = bytes_flush(&connection->out, connection->fd) == BLOCKED;
  if (blocked == connection->writing) return;
  connection->writing = blocked;
  uint32_t events = EPOLLIN | (blocked ? (uint32_t)EPOLLOUT : 0);
  poll_for(poller, EPOLL_CTL_MOD, connection->fd, events, connection);
}

static void serve(struct connection *connection, uint32_t events) {
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
    if (bytes_receive(&connection->in, connection->fd, RECEIVE_MOST) < 0) {
      forget(connection);
      return;
    }
    while (bytes_length(&connection->in) && take_request(connection)) continue;
  }
  flush(connection);
}

static void accept_all(int listener) {
  int fd;
  while ((fd = accept(listener, NULL, NULL)) >= 0) {
    struct connection *connection = need(calloc(1, sizeof *connection));
    make_prompt_socket(fd);
    connection->fd = fd;
    poll_for(poller, EPOLL_CTL_ADD, fd, EPOLLIN, connection);
  }
}

static void step_all_due(void) {
  uint64_t now = now_ns();
  while (heap_next_ns(&due) <= now) {
    struct connection *connection = (struct connection *)due.items[1];
    heap_remove(&due, &connection->paced);
    connection->paced.due_ns += connection->pace.pace_ns;
    if (step(connection)) heap_add(&due, &connection->paced);
    flush(connection);
  }
}

int main(int count, char **arguments) {
  int listeners[64];
  size_t listening = 0;
  struct epoll_event events[512];
  signal(SIGPIPE, SIG_IGN);
  poller = epoll_create1(0);
  for (int i = 1; i < count && listening < 64; i++) {
    if (strncmp(arguments[i], "listen=", 7) != 0) continue;
    listeners[listening] = listen_on(atoi(arguments[i] + 7));
    poll_for(poller, EPOLL_CTL_ADD, listeners[listening], EPOLLIN, &listeners[listening]);
    listening++;
  }
  puts("ready");
  fflush(stdout);
  for (;;) {
    int ready = wait_events(poller, events, 512, heap_next_ns(&due));
    for (int i = 0; i < ready; i++) {
      void *owner = events[i].data.ptr;
      if (owner >= (void *)listeners && owner < (void *)(listeners + listening))
        accept_all(*(int *)owner);
      else
        serve(owner, events[i].events);
    }
    step_all_due();
  }
}
